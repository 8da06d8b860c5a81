"""What tests share: ranks as threads and as processes, models, references, clocks of streams."""
