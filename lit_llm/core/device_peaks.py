"""Dense peaks of devices, which stand in `lit_llm.callbacks`."""

from lit_llm.callbacks.device_peaks import KINDS as KINDS
from lit_llm.callbacks.device_peaks import peak_of as peak_of
from lit_llm.callbacks.device_peaks import peaks_of as peaks_of
