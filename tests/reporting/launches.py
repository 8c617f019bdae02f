"""A launch as plan.json has it."""

LAUNCH = {
    "started": "2026-01-01T00:00:00+00:00",
    "first_step": 0,
    "last_step": 0,
    "versions": {"torch": "2"},
    "machine": {},
    "hardware": {"name": "h100-sxm"},
    "devices": 1,
    "price_usd_hour": None,
    "settings": {},
    "parameters": None,
    "predicted": {},
    "measured": {},
    "ended": None,
    "complete": False,
}
