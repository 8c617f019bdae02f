"""Peak speeds of devices in dense matrix products, in TFLOP/s: the only such table, for MFU and for plans."""

from __future__ import annotations

import re
from collections.abc import Mapping

KINDS = ("bf16", "tf32", "fp32", "fp8")
"""Precisions for which the table has peaks. bf16: also fp16, both with fp32 accumulation. fp32: without tensor cores."""

# (device name, peak of each of KINDS). Vendors print tensor-core figures "with sparsity": halved here. None: not published, or
# sources differ. The pattern must match the whole name, because a variant (another form factor, a laptop part, a MIG slice) has
# another peak. An unknown device has no peak, which is better than a wrong one.
_PEAKS: tuple[tuple[str, tuple[float | None, ...]], ...] = (
    # https://www.nvidia.com/en-us/data-center/a100/ (specifications)
    (r"(NVIDIA )?A100-(SXM4|SXM|PCIE|PCIe)-(40|80)GB|NVIDIA A100 80GB PCIe", (312.0, 156.0, 19.5, None)),
    # https://resources.nvidia.com/en-us-gpu-resources/h100-datasheet-24306 (SXM5, then PCIe)
    (r"NVIDIA H100 80GB HBM3", (989.0, 494.5, 67.0, 1979.0)),
    (r"NVIDIA H100 PCIe", (756.0, 378.0, 51.0, 1513.0)),
    # The 96 GB variant, limited to 500 W. Its peak is not published: here that of H100 NVL (nvidia.com/en-us/data-center/h100)
    (r"NVIDIA H100", (835.0, 417.5, 60.0, 1671.0)),
    # https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446
    (r"NVIDIA H200", (989.0, 494.5, 67.0, 1979.0)),
    # https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet (one of eight; sources differ on tf32 and fp32)
    (r"NVIDIA B200", (2250.0, None, None, 4500.0)),
    # https://www.nvidia.com/en-us/data-center/dgx-b300/ (one of eight)
    (r"NVIDIA B300", (2250.0, None, None, 4500.0)),
    # https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf (as T4)
    (r"Tesla V100-SXM2-(16|32)GB", (125.0, None, 15.7, None)),
    # https://www.nvidia.com/en-us/data-center/tesla-t4/ (fp16; this GPU has no bf16)
    (r"Tesla T4", (65.0, None, 8.1, None)),
    # https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf
    (r"NVIDIA A10G", (70.0, 35.0, 31.5, None)),
    # https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet
    (r"NVIDIA L4", (121.0, 60.0, 30.3, 242.0)),
    # https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413
    (r"NVIDIA L40S", (362.05, 183.0, 91.6, 733.0)),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf, appendix A
    (r"NVIDIA GeForce RTX 4090", (165.2, 82.6, 82.6, 330.3)),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf, appendix A
    (r"NVIDIA GeForce RTX 5090", (209.5, 104.8, 104.8, 419.0)),
    # https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf
    (r"AMD Instinct MI300X( OAM)?", (1307.4, 653.7, 163.4, 2614.9)),
    # https://www.amd.com/en/products/accelerators/instinct/mi300/mi325x.html
    (r"AMD Instinct MI325X( OAM)?", (1307.4, 653.7, 163.4, 2614.9)),
)


def peaks_of(device_name: str) -> dict[str, float | None]:
    """The peaks of a device: precision (`KINDS`) → TFLOP/s. All peaks are None if the device is not in the table.

    Args:
        device_name: as returned by `torch.cuda.get_device_name()`.
    """
    values = next((peaks for pattern, peaks in _PEAKS if re.fullmatch(pattern, device_name)), (None,) * len(KINDS))
    return dict(zip(KINDS, values, strict=True))


def peak_of(peaks: Mapping[str, float | None], precision: str, matmul_precision: str = "highest") -> float | None:
    """The peak speed, in TFLOP/s, of matrix products in a Trainer precision; None if this peak is unknown.

    Args:
        peaks: the peaks of the device, as `peaks_of` returns them.
        precision: `Trainer(precision)`, canonical ("bf16-mixed", "32-true", …).
        matmul_precision: `torch.get_float32_matmul_precision()`. Unless "highest", fp32 matrix products run in tf32.
    """
    if precision.startswith(("bf16", "16")):
        return peaks["bf16"]
    if precision == "32-true":
        return peaks["fp32" if matmul_precision == "highest" else "tf32"]
    return None
