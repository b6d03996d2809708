"""One file a family, found by its being here: `FAMILY` says how its config.json is read and which models of it are
published. docs/models.md, "Adding a family"."""
