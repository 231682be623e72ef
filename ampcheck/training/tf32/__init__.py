"""Float32 products that are not computed in float32: by a setting of the device, or by operands without their bits."""
