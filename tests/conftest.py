"""Eight virtual CPU devices for every test, before JAX is imported. Warnings are errors (pyproject.toml)."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"  # installed ahead-of-time compilers must not be started as backends
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # the TPU compiler looks for a cloud's metadata server otherwise
