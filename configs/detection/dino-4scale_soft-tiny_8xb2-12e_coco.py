_base_ = '../_base_/dino-4scale_soft_12e_coco.py'
