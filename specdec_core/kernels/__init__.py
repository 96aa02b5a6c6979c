"""Operations, each in several forms under one signature."""
