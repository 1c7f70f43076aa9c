"""The page at `/`: plain ES modules and CSS in `static/`, with no build step and nothing from other servers."""
