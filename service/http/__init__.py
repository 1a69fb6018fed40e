"""HTTP as every server of ours speaks it: worker, router and bootstrap server."""
