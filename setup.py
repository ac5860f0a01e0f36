"""pip runs this file; without it, `pip install .` would succeed and install nothing."""

raise SystemExit(
    "kv-fast is run from its clone and is not installed: see README.md (make demo, or pip install -r requirements.txt)"
)
