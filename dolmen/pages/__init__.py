"""The style of every page that dolmen writes (style.py, style.css)."""
