"""The pages, one per file: `page` makes it, `register` adds the callbacks that keep it up to date."""
