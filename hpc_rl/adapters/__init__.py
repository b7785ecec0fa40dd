"""Other people's training programs under our launcher: one row of ADAPTERS (`table.py`) and one file for each."""
