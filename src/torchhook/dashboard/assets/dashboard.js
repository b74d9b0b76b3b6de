// A slider is called what its label says: Dash gives it no name of its own.
new MutationObserver(() => {
  for (const slider of document.querySelectorAll('[role="slider"]:not([aria-label])'))
    slider.setAttribute("aria-label", slider.closest("label")?.getAttribute("title") ?? "step");
}).observe(document, { childList: true, subtree: true });
