"""From descriptors and a workload to what the kernels leave behind."""
