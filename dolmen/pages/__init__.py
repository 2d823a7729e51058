"""Parts of the HTML pages that dolmen writes: plans, runs and the RL report.

page.py  the frame with the shared style (style.css), and figures
svg.py   drawings: shapes, axes and fills
"""
