"""Other methods in the trainer's harness: same encoder, images, augmentation, schedule and views seen.

Losses and momentum encoder of SimCLR and MoCo v2 are lightly's (extra `experiments`).
"""
