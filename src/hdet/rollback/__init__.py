"""What can be gone back to, and when: snapshots of a training, and a judge of its losses."""
