/-
The theorems of the environment `lean`: propositional logic, equality, numbers, lists; easy ones
first. The comment before a theorem names its split; each line of its proof is one turn.

A case that `cases` or `induction` opens names its facts after the constructor's arguments (`left`,
`right`, `h_1`, `k_ih`, `tail_ih`): `tactic.hygienic` is off. What a theorem may use of others is
among its hypotheses. The names N, zero, succ, len, rev and each are those of prelude.lean.
-/

-- Propositional logic -----------------------------------------------------------------------------

-- train
theorem imp_self (p : Prop) : p → p := by
  intro h
  exact h
-- train
theorem use_hypothesis (p q : Prop) (h : p) (g : q) : p := by
  exact h
-- val
theorem imp_const (p q : Prop) : p → q → p := by
  intro h
  intro g
  exact h
-- train
theorem imp_const_right (p q : Prop) : p → q → q := by
  intro h
  intro g
  exact g
-- test
theorem modus_ponens (p q : Prop) (h : p) (g : p → q) : q := by
  apply g
  exact h
-- train
theorem modus_ponens_intro (p q : Prop) : (p → q) → p → q := by
  intro h
  exact h
-- train
theorem modus_ponens_flip (p q : Prop) : p → (p → q) → q := by
  intro h
  intro g
  apply g
  exact h
-- train
theorem imp_trans (p q r : Prop) (h : p → q) (g : q → r) : p → r := by
  intro a
  apply g
  apply h
  exact a
-- val
theorem imp_chain (p q r : Prop) (h : p → q) (g : q → r) (a : p) : r := by
  apply g
  apply h
  exact a
-- train
theorem imp_swap (p q r : Prop) (h : p → q → r) : q → p → r := by
  intro a
  intro b
  apply h
  exact b
  exact a
-- test
theorem imp_distrib (p q r : Prop) (h : p → q → r) (g : p → q) : p → r := by
  intro a
  apply h
  exact a
  apply g
  exact a
-- train
theorem and_intro (p q : Prop) (h : p) (g : q) : p ∧ q := by
  constructor
  exact h
  exact g
-- val
theorem and_intro_flip (p q : Prop) (h : p) (g : q) : q ∧ p := by
  constructor
  exact g
  exact h
-- train
theorem and_self_intro (p : Prop) (h : p) : p ∧ p := by
  constructor
  exact h
  exact h
-- train
theorem and_intro_imp (p q : Prop) : p → q → p ∧ q := by
  intro h
  intro g
  constructor
  exact h
  exact g
-- train
theorem and_left_of (p q : Prop) (h : p ∧ q) : p := by
  cases h
  exact left
-- test
theorem and_right_of (p q : Prop) : p ∧ q → q := by
  intro h
  cases h
  exact right
-- val
theorem and_left_imp (p q : Prop) : p ∧ q → p := by
  intro h
  cases h
  exact left
-- train
theorem and_swap (p q : Prop) (h : p ∧ q) : q ∧ p := by
  cases h
  constructor
  exact right
  exact left
-- test
theorem and_of_and_imp (p q r : Prop) (h : p ∧ q) (g : q → r) : p ∧ r := by
  cases h
  constructor
  exact left
  apply g
  exact right
-- train
theorem and_assoc_right (p q r : Prop) (h : (p ∧ q) ∧ r) : q ∧ r := by
  cases h
  cases left
  constructor
  assumption
  assumption
-- train
theorem curry (p q r : Prop) (h : p ∧ q → r) : p → q → r := by
  intro a
  intro b
  apply h
  constructor
  exact a
  exact b
-- val
theorem uncurry (p q r : Prop) (h : p → q → r) : p ∧ q → r := by
  intro a
  cases a
  apply h
  exact left
  exact right
-- train
theorem or_intro_left (p q : Prop) (h : p) : p ∨ q := by
  left
  exact h
-- test
theorem or_intro_right (p q : Prop) (h : q) : p ∨ q := by
  right
  exact h
-- train
theorem or_intro_imp (p q : Prop) : p → q ∨ p := by
  intro h
  right
  exact h
-- train
theorem or_self_of (p : Prop) (h : p ∨ p) : p := by
  cases h
  exact h_1
  exact h_1
-- train
theorem or_swap (p q : Prop) (h : p ∨ q) : q ∨ p := by
  cases h
  right
  exact h_1
  left
  exact h_1
-- val
theorem or_elim (p q r : Prop) (h : p ∨ q) (f : p → r) (g : q → r) : r := by
  cases h
  apply f
  exact h_1
  apply g
  exact h_1
-- train
theorem or_of_and (p q : Prop) (h : p ∧ q) : p ∨ q := by
  cases h
  left
  exact left
-- test
theorem or_imp_left (p q r : Prop) (h : p ∨ q → r) : p → r := by
  intro a
  apply h
  left
  exact a
-- train
theorem or_imp_right (p q r : Prop) (h : p ∨ q → r) : q → r := by
  intro a
  apply h
  right
  exact a
-- train
theorem and_or_left (p q r : Prop) (h : p ∧ (q ∨ r)) : (p ∧ q) ∨ (p ∧ r) := by
  cases h
  cases right
  left
  exact ⟨left, h⟩
  right
  exact ⟨left, h⟩
-- train
theorem false_elim (p : Prop) (h : False) : p := by
  cases h
-- train
theorem absurd_of (p q : Prop) (h : p) (g : ¬p) : q := by
  contradiction
-- val
theorem not_not_intro (p : Prop) (h : p) : ¬¬p := by
  intro g
  contradiction
-- train
theorem not_and_self (p : Prop) : ¬(p ∧ ¬p) := by
  intro h
  cases h
  contradiction
-- train
theorem contrapositive (p q : Prop) (h : p → q) (g : ¬q) : ¬p := by
  intro a
  apply g
  apply h
  exact a
-- test
theorem not_or_left (p q : Prop) (h : ¬(p ∨ q)) : ¬p := by
  intro a
  apply h
  left
  exact a
-- val
theorem not_or_right (p q : Prop) (h : ¬(p ∨ q)) : ¬q := by
  intro a
  apply h
  right
  exact a
-- train
theorem or_not_elim (p q : Prop) (h : p ∨ q) (g : ¬p) : q := by
  cases h
  contradiction
  exact h_1
-- test
theorem not_or_of_and_not (p q : Prop) (h : ¬p ∧ ¬q) : ¬(p ∨ q) := by
  cases h
  intro g
  cases g
  contradiction
  contradiction
-- train
theorem iff_intro (p q : Prop) (h : p → q) (g : q → p) : p ↔ q := by
  constructor
  exact h
  exact g
-- val
theorem iff_forward (p q : Prop) (h : p ↔ q) (g : p) : q := by
  cases h
  apply mp
  exact g
-- test
theorem iff_backward (p q : Prop) (h : p ↔ q) (g : q) : p := by
  cases h
  apply mpr
  exact g
-- train
theorem iff_swap (p q : Prop) (h : p ↔ q) : q ↔ p := by
  cases h
  constructor
  exact mpr
  exact mp
-- train
theorem and_comm_iff (p q : Prop) : p ∧ q ↔ q ∧ p := by
  constructor
  intro h
  exact ⟨h.right, h.left⟩
  intro h
  exact ⟨h.right, h.left⟩

-- Equality ----------------------------------------------------------------------------------------

-- train
theorem eq_refl_of (n : N) : n = n := by
  rfl
-- train
theorem eq_symm (n m : N) (h : n = m) : m = n := by
  rw [h]
-- val
theorem eq_trans (n m k : N) (h : n = m) (g : m = k) : n = k := by
  rw [h]
  exact g
-- test
theorem eq_trans_left (n m k : N) (h : n = m) (g : n = k) : m = k := by
  rw [← h]
  exact g
-- train
theorem eq_succ (n m : N) (h : n = m) : succ n = succ m := by
  rw [h]
-- train
theorem eq_imp_symm (n m : N) : n = m → m = n := by
  intro h
  rw [h]
-- test
theorem eq_congr (f : N → N) (n m : N) (h : n = m) : f n = f m := by
  rw [h]
-- val
theorem eq_congr_twice (f : N → N) (n : N) (h : f n = n) : f (f n) = n := by
  rw [h]
  exact h
-- train
theorem eq_substitute (p : N → Prop) (n m : N) (h : n = m) (g : p n) : p m := by
  rw [← h]
  exact g
-- test
theorem exists_eq (n : N) : ∃ m, m = succ n := by
  exact ⟨succ n, rfl⟩

-- Numbers -----------------------------------------------------------------------------------------

-- train
theorem add_zero (n : N) : n + zero = n := by
  rfl
-- val
theorem add_succ (n m : N) : n + succ m = succ (n + m) := by
  rfl
-- train
theorem add_one (n : N) : n + succ zero = succ n := by
  rfl
-- train
theorem succ_inj (n m : N) (h : succ n = succ m) : n = m := by
  injection h
-- test
theorem succ_ne_zero (n : N) : ¬(succ n = zero) := by
  intro h
  cases h
-- train
theorem zero_or_succ (n : N) : n = zero ∨ ∃ m, n = succ m := by
  cases n
  left
  rfl
  right
  exact ⟨k, rfl⟩
-- train
theorem zero_add (n : N) : zero + n = n := by
  induction n
  rfl
  exact congrArg succ k_ih
-- val
theorem succ_add (n m : N) : succ n + m = succ (n + m) := by
  induction m
  rfl
  exact congrArg succ k_ih
-- test
theorem add_assoc (n m l : N) : (n + m) + l = n + (m + l) := by
  induction l
  rfl
  exact congrArg succ k_ih
-- train
theorem add_comm (n m : N) (h : ∀ a, zero + a = a) (g : ∀ a b, succ a + b = succ (a + b)) :
    n + m = m + n := by
  induction m
  rw [h]
  rfl
  rw [g]
  exact congrArg succ k_ih
-- train
theorem add_cancel (n m l : N) : n + l = m + l → n = m := by
  intro h
  induction l
  exact h
  injection h
  apply k_ih
  assumption
-- train
theorem mul_zero (n : N) : n * zero = zero := by
  rfl
-- test
theorem mul_succ (n m : N) : n * succ m = n * m + n := by
  rfl
-- train
theorem zero_mul (n : N) : zero * n = zero := by
  induction n
  rfl
  exact k_ih
-- val
theorem mul_one (n : N) (h : ∀ a, zero + a = a) : n * succ zero = n := by
  exact h n

-- Lists -------------------------------------------------------------------------------------------

-- train
theorem nil_append (A : Type) (xs : List A) : [] ++ xs = xs := by
  rfl
-- test
theorem cons_append (A : Type) (x : A) (xs ys : List A) : x :: xs ++ ys = x :: (xs ++ ys) := by
  rfl
-- train
theorem cons_ne_nil (A : Type) (x : A) (xs : List A) : ¬(x :: xs = []) := by
  intro h
  cases h
-- val
theorem head_eq (A : Type) (x y : A) (xs ys : List A) (h : x :: xs = y :: ys) : x = y := by
  cases h
  rfl
-- train
theorem tail_eq (A : Type) (x y : A) (xs ys : List A) (h : x :: xs = y :: ys) : xs = ys := by
  cases h
  rfl
-- train
theorem append_nil (A : Type) (xs : List A) : xs ++ [] = xs := by
  induction xs
  rfl
  exact congrArg (cons head) tail_ih
-- test
theorem append_assoc (A : Type) (xs ys zs : List A) : (xs ++ ys) ++ zs = xs ++ (ys ++ zs) := by
  induction xs
  rfl
  exact congrArg (cons head) tail_ih
-- train
theorem each_id (A : Type) (xs : List A) : each id xs = xs := by
  induction xs
  rfl
  exact congrArg (cons head) tail_ih
-- val
theorem each_append (A B : Type) (f : A → B) (xs ys : List A) :
    each f (xs ++ ys) = each f xs ++ each f ys := by
  induction xs
  rfl
  exact congrArg (cons (f head)) tail_ih
-- train
theorem len_each (A B : Type) (f : A → B) (xs : List A) : len (each f xs) = len xs := by
  induction xs
  rfl
  exact congrArg succ tail_ih
-- test
theorem len_append (A : Type) (xs ys : List A) (h : ∀ a, zero + a = a)
    (g : ∀ a b, succ a + b = succ (a + b)) : len (xs ++ ys) = len xs + len ys := by
  induction xs
  exact Eq.symm (h (len ys))
  exact Eq.trans (congrArg succ tail_ih) (Eq.symm (g (len tail) (len ys)))
-- train
theorem rev_one (A : Type) (x : A) : rev (x :: []) = x :: [] := by
  rfl
