"""The HTML pages that dolmen writes (plans, runs and the RL report) and its pictures: page.py has
the frame with the shared style (style.css), picture.py draws with matplotlib.
"""
