"""Float32 products that the device does not compute in float32."""
