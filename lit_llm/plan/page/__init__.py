"""Plans as one HTML file with pictures: `plan_page` and `sweep_page`."""

from lit_llm.plan.page.page import plan_page, sweep_page

__all__ = ["plan_page", "sweep_page"]
