"""Leaders and followers: what they send each other, and how one learns of the other's end."""
