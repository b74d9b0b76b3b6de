"""Where, what and when: sites, taps, sessions and hooks; and what every room needs of a model and a batch."""
