"""Times of backups and restores on a GPU, SGLang's own beside ours, and what runs beside them."""
