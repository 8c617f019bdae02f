"""What a launch costs, as lines for the terminal."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lit_llm.callbacks.progress_bar import format_duration
from lit_llm.core.number_text import money_range
from lit_llm.plan.compute import cost_usd
from lit_llm.plan.hardware import Hardware


@dataclass
class RunCost:
    """The price of the devices of a run, from now on.

    Attributes:
        usd_hour: lowest and highest price of a device-hour.
        count: devices.
        where: these as text, and where the price is from.
        began: when this was made.
    """

    usd_hour: tuple[float, float]
    count: int
    where: str
    began: float

    @classmethod
    def known(cls, hardware: Hardware, price: float | None, count: int) -> RunCost | None:
        """None if nobody knows a price.

        Args:
            price: USD per device-hour. None: that of the hardware table.
        """
        usd_hour = hardware.price_usd_hour if price is None else (price, price)
        if usd_hour is None:
            return None
        origin = "assumed price, --plan.price" if price is None else "--plan.price"
        devices = f"{count} x {hardware.name}" if count > 1 else hardware.name
        return cls(usd_hour, count, f"{devices} ({origin})", time.monotonic())

    def planned(self, seconds: float) -> str:
        """For example "cost: about $1.2 planned for 37m00s on h100-sxm (--plan.price)"."""
        return self._line(seconds, "planned for")

    def so_far(self) -> str:
        """The same, for the time since this was made."""
        return self._line(time.monotonic() - self.began, "for")

    def _line(self, seconds: float, words: str) -> str:
        said = money_range(*(cost_usd(seconds, self.count, usd) for usd in self.usd_hour))
        about = "" if said.startswith("less") else "about "
        return f"cost: {about}{said} {words} {format_duration(seconds)} on {self.where}"
