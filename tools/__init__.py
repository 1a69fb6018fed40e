"""Programs for those who work on Tandem. Nothing here is part of the product."""
