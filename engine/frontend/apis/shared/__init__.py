"""What several APIs share: fields of bodies, constraints, models, streams."""
