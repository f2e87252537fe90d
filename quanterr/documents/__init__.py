"""Results of each command as data with a schema version: model, view and values of each kind."""
