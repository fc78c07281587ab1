"""Small dense problems on `[m, m]`: one solver per file; `search` has the helpers of the iterative ones."""
