"""What tests share: tables of cases, the tensors that they describe, the rule that results are held to."""
