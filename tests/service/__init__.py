"""service/http: what every server answers alike."""
