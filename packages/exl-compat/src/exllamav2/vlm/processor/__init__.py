"""`exllamav2.vlm.processor`: preparation of images, by family."""
