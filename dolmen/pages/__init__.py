"""Parts of the HTML pages that dolmen writes (plans, runs and the RL report): page.py has their
frame with the shared style (style.css), and drawings.
"""
