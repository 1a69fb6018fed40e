"""The `tandem` command, the local cluster and the bench."""
