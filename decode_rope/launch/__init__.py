"""From a record of arguments to the CUDA driver: what each kernel is told, its geometry, its plans and its compiled variants."""
