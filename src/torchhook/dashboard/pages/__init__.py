"""One file a page: `page` makes it as of now, `register` adds what keeps it up to date."""
