"""What runs inside a user's program: `on_path/sitecustomize.py` starts it, `hooks.py` waits for a library."""
