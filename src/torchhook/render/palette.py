"""The colours of all figures: reports, plots and the dashboard."""

# Okabe and Ito's colours, which colour-blind readers can tell apart. All but yellow work on light and on dark paper.
BLUE, GREEN, ORANGE, VERMILLION = "#0072b2", "#009e73", "#e69f00", "#d55e00"
PURPLE, SKY_BLUE, YELLOW, GREY = "#cc79a7", "#56b4e9", "#f0e442", "#8a9099"

BLACK, WHITE = "#000000", "#ffffff"
QUIET = "#5b626b"  # for words beside a figure, dark enough to read on light paper

LINES = (BLUE, GREEN, PURPLE, SKY_BLUE, GREY, VERMILLION, ORANGE)
"""The colours of several lines in one figure, in this order: those near the colour of what is not finite come last."""

SEVERITY = {"info": BLUE, "warning": ORANGE, "error": VERMILLION}

# The ink and the paper of pages, light and dark, for what style sheets do not reach.
PAGES = {"light": ("#1d2024", "#f7f7f5"), "dark": ("#e8e9eb", "#14161a")}

# Colour scales, by names that both matplotlib and plotly know.
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"

# Values that no colour scale holds, the same in every plot and page. None of the three lies on a scale above.
ZERO, NONFINITE, UNMEASURED = "#f0027f", "#ff7f00", "#c3c7cd"
