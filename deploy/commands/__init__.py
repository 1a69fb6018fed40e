"""One module for each subcommand of `tandem`."""
