"""Models in few bits, chosen with calibration data, measured layer by layer and proved by the engine that runs them."""
