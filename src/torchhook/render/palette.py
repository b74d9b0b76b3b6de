"""The colours of all figures: reports, plots and the dashboard."""

# Okabe and Ito's colours, which colour-blind readers can tell apart. All but yellow work on light and on dark paper.
BLUE, GREEN, ORANGE, VERMILLION = "#0072b2", "#009e73", "#e69f00", "#d55e00"
PURPLE, SKY_BLUE, YELLOW, GREY = "#cc79a7", "#56b4e9", "#f0e442", "#8a9099"

LINES = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY_BLUE, GREY)
"""The colours of several lines in one figure, in this order."""

SEVERITY = {"info": BLUE, "warning": ORANGE, "error": VERMILLION}

# Colour scales, by names that both matplotlib and plotly know.
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"
