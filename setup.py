"""pip calls this; without it, `pip install .` would succeed and install nothing."""

raise SystemExit("kv-fast is run from its clone and is not installed: pip install -r requirements.txt, then see README.md")
