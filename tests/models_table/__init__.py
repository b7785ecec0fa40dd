"""The table of docs/models.md: which families of models do what, as tests find it."""
