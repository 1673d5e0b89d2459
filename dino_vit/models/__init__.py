"""The vision transformer and its parts, the projection head, and the student/teacher pair."""
