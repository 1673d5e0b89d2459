"""Images in tables: Parquet files, and datasets of the Hugging Face hub."""
