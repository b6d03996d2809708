"""One file per family. `FAMILY` reads its config.json and lists its published models. Files in this folder are found
automatically. See docs/models.md, "Adding a family"."""
