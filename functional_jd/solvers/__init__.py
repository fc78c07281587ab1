"""Small dense problems on `[m, m]`: one solver per file, and in `search` what those that search have in common."""
