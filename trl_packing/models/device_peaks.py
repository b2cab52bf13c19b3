"""Published peaks of devices, in floating-point operations per second.

Peaks are dense tensor-core rates with float32 accumulation, at the boost clock and without
sparsity, which is what PyTorch's matrix products use. A device that is not in the table has no
peak, and thus no MFU: no peak is guessed from a similar name or for a slice of a device (MIG).
"""

import re

TERA = 10**12

# (pattern of the device's name, {dtype: TFLOP/s}). Sources: NVIDIA's data sheet of each product, or
# appendix A of the GA102 and Ada whitepapers for RTX cards. The first pattern that matches counts.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    # https://www.nvidia.com/en-us/data-center/dgx-b200 (a DGX has eight)
    (r"NVIDIA B200\b", {"bfloat16": 2250, "float16": 2250}),
    # https://www.nvidia.com/en-us/data-center/h200; the NVL column is the card's
    (r"NVIDIA H200 NVL", {"bfloat16": 835, "float16": 835, "tf32": 417, "float32": 60}),
    (r"NVIDIA H200$", {"bfloat16": 989, "float16": 989, "tf32": 494, "float32": 67}),
    # https://www.nvidia.com/en-us/data-center/h100
    (r"NVIDIA H100 NVL", {"bfloat16": 835, "float16": 835, "tf32": 417, "float32": 60}),
    (r"NVIDIA H100 PCIe", {"bfloat16": 756, "float16": 756, "tf32": 378, "float32": 51}),
    (r"NVIDIA H100 80GB HBM3$", {"bfloat16": 989, "float16": 989, "tf32": 494, "float32": 67}),
    # https://www.nvidia.com/en-us/data-center/a100; SXM and PCIe, 40 and 80 GB
    (
        r"A100(-SXM4|-PCIE)-\d+GB$|A100 80GB PCIe$",
        {"bfloat16": 312, "float16": 312, "tf32": 156, "float32": 19.5},
    ),
    # https://www.nvidia.com/en-us/data-center/l40s, l40, l4
    (r"NVIDIA L40S$", {"bfloat16": 362, "float16": 362, "tf32": 183, "float32": 91.6}),
    (r"NVIDIA L40$", {"bfloat16": 181, "float16": 181, "tf32": 90.5, "float32": 90.5}),
    (r"NVIDIA L4$", {"bfloat16": 121, "float16": 121, "tf32": 60, "float32": 30.3}),
    # https://www.nvidia.com/en-us/data-center/products/a10-gpu, a40
    (r"NVIDIA A10$", {"bfloat16": 125, "float16": 125, "tf32": 62.5, "float32": 31.2}),
    (r"NVIDIA A40$", {"bfloat16": 149.7, "float16": 149.7, "tf32": 74.8, "float32": 37.4}),
    # https://www.nvidia.com/en-us/data-center/tesla-t4, v100; neither has bfloat16 tensor cores
    (r"Tesla T4$", {"float16": 65, "float32": 8.1}),
    (r"Tesla V100S-PCIE", {"float16": 130, "float32": 16.4}),
    (r"Tesla V100-SXM2", {"float16": 125, "float32": 15.7}),
    (r"Tesla V100-PCIE", {"float16": 112, "float32": 14}),
    (r"GeForce RTX 4090$", {"bfloat16": 165.2, "float16": 165.2, "tf32": 82.6, "float32": 82.6}),
    (r"GeForce RTX 3090$", {"bfloat16": 71, "float16": 71, "tf32": 35.6, "float32": 35.6}),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak of a device in FLOP/s, None if it is not known.

    Args:
        device_name: name from `torch.cuda.get_device_name`.
        dtype: type in which matrix products are computed: ``"bfloat16"``, ``"float16"``,
            ``"tf32"`` or ``"float32"``.

    Example:
        >>> peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16")
        312000000000000.0
        >>> peak_flops("NVIDIA A10G", "bfloat16") is None
        True
    """
    if "MIG" in device_name:
        return None
    for pattern, peaks in _PEAKS:
        if re.search(pattern, device_name):
            tera = peaks.get(dtype)
            return None if tera is None else float(tera * TERA)
    return None
