/-
The theorems of the environment `lean`; each line of a proof is one turn.

`-- C: a | b` before a theorem makes one theorem of it for each alternative, in place of the word C.
In an alternative, _ stands for the argument: with `-- C: succ _ | f _`, C(n) becomes succ n and f n.
`draw_theorem` in theorems.py draws more.

A case that `cases` or `induction` opens names its facts after the constructor's arguments (`left`,
`right`, `h_1`, `k_ih`, `tail_ih`): `tactic.hygienic` is off. What a theorem may use of others is
among its hypotheses. The names N, zero, succ, len, rev and each are those of prelude.lean.
-/

-- Propositional logic -----------------------------------------------------------------------------

theorem imp_self (p : Prop) : p → p := by
  intro h
  exact h

theorem use_hypothesis (p q : Prop) (h : p) (g : q) : p := by
  exact h

theorem imp_const (p q : Prop) : p → q → p := by
  intro h
  intro g
  exact h

theorem imp_const_right (p q : Prop) : p → q → q := by
  intro h
  intro g
  exact g

theorem modus_ponens (p q : Prop) (h : p) (g : p → q) : q := by
  apply g
  exact h

theorem modus_ponens_intro (p q : Prop) : (p → q) → p → q := by
  intro h
  exact h

theorem modus_ponens_flip (p q : Prop) : p → (p → q) → q := by
  intro h
  intro g
  apply g
  exact h

theorem imp_trans (p q r : Prop) (h : p → q) (g : q → r) : p → r := by
  intro a
  apply g
  apply h
  exact a

theorem imp_chain (p q r : Prop) (h : p → q) (g : q → r) (a : p) : r := by
  apply g
  apply h
  exact a

theorem imp_swap (p q r : Prop) (h : p → q → r) : q → p → r := by
  intro a
  intro b
  apply h
  exact b
  exact a

theorem imp_distrib (p q r : Prop) (h : p → q → r) (g : p → q) : p → r := by
  intro a
  apply h
  exact a
  apply g
  exact a

theorem and_intro (p q : Prop) (h : p) (g : q) : p ∧ q := by
  constructor
  exact h
  exact g

theorem and_intro_flip (p q : Prop) (h : p) (g : q) : q ∧ p := by
  constructor
  exact g
  exact h

theorem and_self_intro (p : Prop) (h : p) : p ∧ p := by
  constructor
  exact h
  exact h

theorem and_intro_imp (p q : Prop) : p → q → p ∧ q := by
  intro h
  intro g
  constructor
  exact h
  exact g

theorem and_left_of (p q : Prop) (h : p ∧ q) : p := by
  cases h
  exact left

theorem and_right_of (p q : Prop) : p ∧ q → q := by
  intro h
  cases h
  exact right

theorem and_left_imp (p q : Prop) : p ∧ q → p := by
  intro h
  cases h
  exact left

theorem and_swap (p q : Prop) (h : p ∧ q) : q ∧ p := by
  cases h
  constructor
  exact right
  exact left

theorem and_of_and_imp (p q r : Prop) (h : p ∧ q) (g : q → r) : p ∧ r := by
  cases h
  constructor
  exact left
  apply g
  exact right

theorem and_assoc_right (p q r : Prop) (h : (p ∧ q) ∧ r) : q ∧ r := by
  cases h
  cases left
  constructor
  assumption
  assumption

theorem curry (p q r : Prop) (h : p ∧ q → r) : p → q → r := by
  intro a
  intro b
  apply h
  constructor
  exact a
  exact b

theorem uncurry (p q r : Prop) (h : p → q → r) : p ∧ q → r := by
  intro a
  cases a
  apply h
  exact left
  exact right

theorem or_intro_left (p q : Prop) (h : p) : p ∨ q := by
  left
  exact h

theorem or_intro_right (p q : Prop) (h : q) : p ∨ q := by
  right
  exact h

theorem or_intro_imp (p q : Prop) : p → q ∨ p := by
  intro h
  right
  exact h

theorem or_self_of (p : Prop) (h : p ∨ p) : p := by
  cases h
  exact h_1
  exact h_1

theorem or_swap (p q : Prop) (h : p ∨ q) : q ∨ p := by
  cases h
  right
  exact h_1
  left
  exact h_1

theorem or_elim (p q r : Prop) (h : p ∨ q) (f : p → r) (g : q → r) : r := by
  cases h
  apply f
  exact h_1
  apply g
  exact h_1

theorem or_of_and (p q : Prop) (h : p ∧ q) : p ∨ q := by
  cases h
  left
  exact left

theorem or_imp_left (p q r : Prop) (h : p ∨ q → r) : p → r := by
  intro a
  apply h
  left
  exact a

theorem or_imp_right (p q r : Prop) (h : p ∨ q → r) : q → r := by
  intro a
  apply h
  right
  exact a

theorem and_or_left (p q r : Prop) (h : p ∧ (q ∨ r)) : (p ∧ q) ∨ (p ∧ r) := by
  cases h
  cases right
  left
  exact ⟨left, h⟩
  right
  exact ⟨left, h⟩

theorem false_elim (p : Prop) (h : False) : p := by
  cases h

theorem absurd_of (p q : Prop) (h : p) (g : ¬p) : q := by
  contradiction

theorem not_not_intro (p : Prop) (h : p) : ¬¬p := by
  intro g
  contradiction

theorem not_and_self (p : Prop) : ¬(p ∧ ¬p) := by
  intro h
  cases h
  contradiction

theorem contrapositive (p q : Prop) (h : p → q) (g : ¬q) : ¬p := by
  intro a
  apply g
  apply h
  exact a

theorem not_or_left (p q : Prop) (h : ¬(p ∨ q)) : ¬p := by
  intro a
  apply h
  left
  exact a

theorem not_or_right (p q : Prop) (h : ¬(p ∨ q)) : ¬q := by
  intro a
  apply h
  right
  exact a

theorem or_not_elim (p q : Prop) (h : p ∨ q) (g : ¬p) : q := by
  cases h
  contradiction
  exact h_1

theorem not_or_of_and_not (p q : Prop) (h : ¬p ∧ ¬q) : ¬(p ∨ q) := by
  cases h
  intro g
  cases g
  contradiction
  contradiction

theorem iff_intro (p q : Prop) (h : p → q) (g : q → p) : p ↔ q := by
  constructor
  exact h
  exact g

theorem iff_forward (p q : Prop) (h : p ↔ q) (g : p) : q := by
  cases h
  apply mp
  exact g

theorem iff_backward (p q : Prop) (h : p ↔ q) (g : q) : p := by
  cases h
  apply mpr
  exact g

theorem iff_swap (p q : Prop) (h : p ↔ q) : q ↔ p := by
  cases h
  constructor
  exact mpr
  exact mp

theorem and_comm_iff (p q : Prop) : p ∧ q ↔ q ∧ p := by
  constructor
  intro h
  exact ⟨h.right, h.left⟩
  intro h
  exact ⟨h.right, h.left⟩

theorem and_imp_swap (p q r : Prop) (h : q ∧ p → r) : p ∧ q → r := by
  intro a
  cases a
  apply h
  exact ⟨right, left⟩

theorem and_of_imp (p q r : Prop) (h : p → q) (g : p → r) : p → q ∧ r := by
  intro a
  constructor
  exact h a
  exact g a

theorem imp_of_imp_and (p q r : Prop) (h : p → q ∧ r) : p → r := by
  intro a
  exact (h a).right

theorem or_of_imp (p q r : Prop) (h : p → q) (g : p ∨ q) : q ∨ r := by
  cases g
  left
  apply h
  exact h_1
  left
  exact h_1

theorem or_map (p q r : Prop) (h : q → r) (g : p ∨ q) : p ∨ r := by
  cases g
  left
  exact h_1
  right
  apply h
  exact h_1

theorem or_assoc_left (p q r : Prop) (h : p ∨ q) : p ∨ q ∨ r := by
  cases h
  left
  exact h_1
  right
  left
  exact h_1

theorem not_of_imp_not (p : Prop) (h : p → ¬p) : ¬p := by
  intro a
  apply h
  exact a
  exact a

theorem not_not_not (p : Prop) (h : ¬¬¬p) : ¬p := by
  intro a
  apply h
  intro b
  contradiction

theorem imp_false_of (p q : Prop) (h : p → q) (g : p → ¬q) : ¬p := by
  intro a
  apply g
  exact a
  apply h
  exact a

theorem and_not_elim (p q r : Prop) (h : p ∧ q) (g : ¬q) : r := by
  cases h
  contradiction

theorem iff_trans (p q r : Prop) (h : p ↔ q) (g : q ↔ r) : p → r := by
  intro a
  apply g.mp
  apply h.mp
  exact a

theorem iff_not (p q : Prop) (h : p ↔ q) (g : ¬q) : ¬p := by
  intro a
  apply g
  apply h.mp
  exact a

theorem iff_true_of (p q : Prop) (h : p) (g : q) : p ↔ q := by
  constructor
  intro a
  exact g
  intro a
  exact h

theorem and_iff_of_imp (p q : Prop) (h : p → q) : p ∧ q ↔ p := by
  constructor
  intro a
  exact a.left
  intro a
  exact ⟨a, h a⟩

-- S: ∧ | ∨
theorem op_comm (p q r : Prop) (h : (p S q) → r) (g : r → p S q) : (p S q) ↔ r := by
  constructor
  exact h
  exact g

-- F: p ∧ q | p ∨ q | p → q | ¬p | p ↔ q
theorem use_fact (p q r : Prop) (h : r) (g : F) : F := by
  exact g

-- F: p ∧ q | p ∨ q | p → q | ¬p | p ↔ q
theorem imp_fact (p q r : Prop) (h : r → (F)) : r → (F) := by
  intro a
  apply h
  exact a

-- F: p ∧ q | p ∨ q | p → q | ¬p | p ↔ q
theorem and_fact (p q r : Prop) (h : r) (g : F) : r ∧ (F) := by
  constructor
  exact h
  exact g

-- F: p ∧ q | p ∨ q | p → q | ¬p | p ↔ q
theorem or_fact (p q r : Prop) (g : F) : r ∨ (F) := by
  right
  exact g

-- F: p ∧ q | p ∨ q | p → q | ¬p | p ↔ q
theorem false_fact (p q r : Prop) (h : F) (g : ¬(F)) : r := by
  contradiction

-- Predicates --------------------------------------------------------------------------------------

theorem forall_use (A : Type) (p : A → Prop) (a : A) (h : ∀ x, p x) : p a := by
  exact h a

theorem forall_imp_use (A : Type) (p q : A → Prop) (a : A) (h : ∀ x, p x → q x) (g : p a) :
    q a := by
  apply h
  exact g

theorem exists_intro (A : Type) (p : A → Prop) (a : A) (h : p a) : ∃ x, p x := by
  exact ⟨a, h⟩

theorem exists_of_forall (A : Type) (p : A → Prop) (a : A) (h : ∀ x, p x) : ∃ x, p x := by
  exact ⟨a, h a⟩

theorem exists_imp (A : Type) (p q : A → Prop) (h : ∀ x, p x → q x) (g : ∃ x, p x) :
    ∃ x, q x := by
  cases g
  exact ⟨w, h w h_1⟩

theorem forall_and (A : Type) (p q : A → Prop) (h : ∀ x, p x ∧ q x) (a : A) : q a ∧ p a := by
  constructor
  exact (h a).right
  exact (h a).left

theorem exists_and_left (A : Type) (p q : A → Prop) (h : ∃ x, p x ∧ q x) : ∃ x, p x := by
  cases h
  exact ⟨w, h_1.left⟩

theorem exists_and_right (A : Type) (p q : A → Prop) (h : ∃ x, p x ∧ q x) : ∃ x, q x := by
  cases h
  exact ⟨w, h_1.right⟩

theorem exists_or_split (A : Type) (p q : A → Prop) (h : ∃ x, p x ∨ q x) :
    (∃ x, p x) ∨ ∃ x, q x := by
  cases h
  cases h_1
  left
  exact ⟨w, h⟩
  right
  exact ⟨w, h⟩

theorem exists_or_intro (A : Type) (p q : A → Prop) (h : ∃ x, p x) : ∃ x, p x ∨ q x := by
  cases h
  exact ⟨w, Or.inl h_1⟩

theorem not_exists_use (A : Type) (p : A → Prop) (h : ¬∃ x, p x) : ∀ x, ¬p x := by
  intro x
  intro g
  apply h
  exact ⟨x, g⟩

theorem not_exists_of (A : Type) (p : A → Prop) (h : ∀ x, ¬p x) : ¬∃ x, p x := by
  intro g
  cases g
  exact h w h_1

theorem not_forall_of (A : Type) (p : A → Prop) (h : ∃ x, ¬p x) : ¬∀ x, p x := by
  intro g
  cases h
  apply h_1
  exact g w

theorem exists_elim (A : Type) (p : A → Prop) (q : Prop) (h : ∀ x, p x → q) (g : ∃ x, p x) :
    q := by
  cases g
  exact h w h_1

theorem exists_curry (A : Type) (p : A → Prop) (q : Prop) (h : (∃ x, p x) → q) : ∀ x, p x → q := by
  intro x
  intro a
  apply h
  exact ⟨x, a⟩

-- S: ∧ | ∨ | ↔
theorem forall_op_swap (A B : Type) (p : A → B → Prop) (q : Prop)
    (h : ∀ x y, p x y S q) : ∀ y x, p x y S q := by
  intro y
  intro x
  exact h x y

theorem exists_forall (A B : Type) (p : A → B → Prop) (h : ∃ x, ∀ y, p x y) :
    ∀ y, ∃ x, p x y := by
  cases h
  intro y
  exact ⟨w, h_1 y⟩

theorem exists_swap (A B : Type) (p : A → B → Prop) (h : ∃ x, ∃ y, p x y) :
    ∃ y, ∃ x, p x y := by
  cases h
  cases h_1
  exact ⟨w_1, w, h⟩

theorem relation_symm (A : Type) (r : A → A → Prop) (s : ∀ x y, r x y → r y x) (a b : A)
    (h : r a b) : r b a := by
  apply s
  exact h

theorem relation_trans (A : Type) (r : A → A → Prop) (t : ∀ x y z, r x y → r y z → r x z)
    (a b c d : A) (h : r a b) (g : r b c) (k : r c d) : r a d := by
  apply t a b d
  exact h
  apply t b c d
  exact g
  exact k

theorem relation_euclid (A : Type) (r : A → A → Prop) (s : ∀ x y, r x y → r y x)
    (t : ∀ x y z, r x y → r y z → r x z) (a b c : A) (h : r a b) (g : r a c) : r b c := by
  apply t b a c
  apply s
  exact h
  exact g

theorem relation_irreflexive (A : Type) (r : A → A → Prop) (h : ∀ x y, r x y → ¬r y x) (a : A) :
    ¬r a a := by
  intro g
  exact h a a g g

-- Equality ----------------------------------------------------------------------------------------

theorem eq_refl_of (n : N) : n = n := by
  rfl

theorem eq_symm (n m : N) (h : n = m) : m = n := by
  rw [h]

theorem eq_trans (n m k : N) (h : n = m) (g : m = k) : n = k := by
  rw [h]
  exact g

theorem eq_trans_left (n m k : N) (h : n = m) (g : n = k) : m = k := by
  rw [← h]
  exact g

theorem eq_succ (n m : N) (h : n = m) : succ n = succ m := by
  rw [h]

theorem eq_imp_symm (n m : N) : n = m → m = n := by
  intro h
  rw [h]

theorem eq_congr (f : N → N) (n m : N) (h : n = m) : f n = f m := by
  rw [h]

theorem eq_congr_twice (f : N → N) (n : N) (h : f n = n) : f (f n) = n := by
  rw [h]
  exact h

theorem eq_substitute (p : N → Prop) (n m : N) (h : n = m) (g : p n) : p m := by
  rw [← h]
  exact g

theorem exists_eq (n : N) : ∃ m, m = succ n := by
  exact ⟨succ n, rfl⟩

-- C: succ _ | _ + k | k + _ | _ * k | k * _ | f _ | f (succ _) | succ _ + k
theorem eq_context (f : N → N) (n m k : N) (h : n = m) : C(n) = C(m) := by
  rw [h]

-- C: succ _ | _ + k | k * _ | f _
theorem eq_context_back (f : N → N) (n m k : N) (h : n = m) (g : C(m) = k) : C(n) = k := by
  rw [h]
  exact g

-- C: succ _ | _ + k | k * _ | f _
theorem eq_context_fact (f : N → N) (n m k : N) (h : n = m) (g : C(n) = k) : C(m) = k := by
  rw [← h]
  exact g

-- C: succ _ | _ + k | f _
theorem ne_context (f : N → N) (n m k : N) (h : ¬(C(n) = C(m))) : ¬(n = m) := by
  intro g
  apply h
  rw [g]

theorem eq_of_forall (f : N → N) (h : ∀ a, f a = a) (n : N) : f (f (f n)) = n := by
  rw [h]
  rw [h]
  exact h n

theorem eq_of_both (f g : N → N) (h : ∀ a, f a = g a) (n m : N) (k : n = m) : f n = g m := by
  rw [k]
  exact h m

theorem fun_const (f : N → N) (h : ∀ a b, f a = f b) : f zero = f (succ zero) := by
  apply h

-- R: n = m | p n | ¬p n
theorem exists_same (p : N → Prop) (n m : N) (h : R) : ∃ a, a = n ∧ (R) := by
  exact ⟨n, rfl, h⟩

-- Numbers -----------------------------------------------------------------------------------------

theorem add_zero (n : N) : n + zero = n := by
  rfl

theorem add_succ (n m : N) : n + succ m = succ (n + m) := by
  rfl

theorem add_one (n : N) : n + succ zero = succ n := by
  rfl

theorem succ_inj (n m : N) (h : succ n = succ m) : n = m := by
  injection h

theorem succ_ne_zero (n : N) : ¬(succ n = zero) := by
  intro h
  cases h

theorem zero_or_succ (n : N) : n = zero ∨ ∃ m, n = succ m := by
  cases n
  left
  rfl
  right
  exact ⟨k, rfl⟩

theorem zero_add (n : N) : zero + n = n := by
  induction n
  rfl
  exact congrArg succ k_ih

theorem succ_add (n m : N) : succ n + m = succ (n + m) := by
  induction m
  rfl
  exact congrArg succ k_ih

theorem add_assoc (n m l : N) : (n + m) + l = n + (m + l) := by
  induction l
  rfl
  exact congrArg succ k_ih

theorem add_comm (n m : N) (h : ∀ a, zero + a = a) (g : ∀ a b, succ a + b = succ (a + b)) :
    n + m = m + n := by
  induction m
  rw [h]
  rfl
  rw [g]
  exact congrArg succ k_ih

theorem add_cancel (n m l : N) : n + l = m + l → n = m := by
  intro h
  induction l
  exact h
  injection h
  apply k_ih
  assumption

theorem mul_zero (n : N) : n * zero = zero := by
  rfl

theorem mul_succ (n m : N) : n * succ m = n * m + n := by
  rfl

theorem zero_mul (n : N) : zero * n = zero := by
  induction n
  rfl
  exact k_ih

theorem mul_one (n : N) (h : ∀ a, zero + a = a) : n * succ zero = n := by
  exact h n

-- T: zero + zero | zero * succ zero | succ zero * zero
theorem zero_value : T = zero := by
  rfl

-- T: succ zero + zero | zero + succ zero | succ zero * succ zero | succ (zero * zero)
theorem one_value : T = succ zero := by
  rfl

-- T: succ zero + succ zero | succ (succ zero) * succ zero | succ zero + succ zero + zero
theorem two_value : T = succ (succ zero) := by
  rfl

-- T: zero + succ zero | succ zero * succ zero | succ (succ zero) + zero
theorem value_ne_zero : ¬(T = zero) := by
  intro h
  cases h

-- T: n + succ zero | succ n + zero | zero + succ n | zero * n + succ n
theorem succ_cases (n m : N) (g : T = succ n) (h : m = T) : m = succ n := by
  rw [h]
  exact g

theorem succ_inj_imp (n m k : N) (h : succ n = succ m) (g : m = k) : n = k := by
  injection h
  rw [k_eq]
  exact g

theorem succ_succ_inj (n m : N) (h : succ (succ n) = succ (succ m)) : n = m := by
  cases h
  rfl

theorem succ_ne_self (n : N) : ¬(succ n = n) := by
  intro h
  induction n
  cases h
  injection h
  apply k_ih
  assumption

theorem add_right_comm (n m k : N) (h : ∀ a b, a + b = b + a) : n + m + k = k + (n + m) := by
  rw [h]

theorem add_left_swap (n m k : N) (h : ∀ a b, a + b = b + a) : n + m + k = m + n + k := by
  rw [h n m]

theorem add_mid (n m k : N) (h : ∀ a b c, (a + b) + c = a + (b + c)) (g : m + k = zero) :
    n + m + k = n := by
  rw [h]
  rw [g]
  rfl

-- S: + | *
theorem op_comm_twice (n m k l : N) (h : ∀ a b, a S b = b S a) :
    (n S m) S (k S l) = (k S l) S (m S n) := by
  rw [h n m]
  exact h _ _

-- S: + | *
theorem op_assoc_use (n m k l : N) (h : ∀ a b c, (a S b) S c = a S (b S c)) :
    ((n S m) S k) S l = (n S m) S (k S l) := by
  exact h _ _ _

theorem mul_two (n : N) (h : n * succ zero = n) : n * succ (succ zero) = n + n := by
  exact congrArg (fun a => a + n) h

theorem even_add (n m k : N) (h : n = m + m) : n + zero = m + m := by
  exact h

theorem exists_pred (n : N) (h : ¬(n = zero)) : ∃ m, n = succ m := by
  cases n
  contradiction
  exact ⟨k, rfl⟩

-- T: n + m | n * m | succ n | zero
theorem exists_value (n m : N) : ∃ a, a = T := by
  exact ⟨T, rfl⟩

theorem le_refl_add (n : N) : ∃ a, n + a = n := by
  exact ⟨zero, rfl⟩

theorem le_succ_add (n : N) : ∃ a, n + a = succ n := by
  exact ⟨succ zero, rfl⟩

theorem le_trans_add (n m l : N) (h : ∃ a, n + a = m) (g : m = l) : ∃ a, n + a = l := by
  rw [← g]
  exact h

-- Booleans ----------------------------------------------------------------------------------------

-- T: (!!b) = b | (b && true) = b | (b || false) = b | (true && b) = b | (false || b) = b
theorem bool_same (b : Bool) : T := by
  cases b
  rfl
  rfl

-- T: (b && false) = false | (b || true) = true | (b && !b) = false | (b || !b) = true
theorem bool_constant (b : Bool) : T := by
  cases b
  rfl
  rfl

-- S: && | ||
theorem bool_idempotent (b : Bool) : (b S b) = b := by
  cases b
  rfl
  rfl

-- S: && | ||
theorem bool_assoc (b c d : Bool) : (b S c S d) = (b S (c S d)) := by
  cases b
  rfl
  rfl

-- S: && | ||
theorem bool_comm (b c : Bool) : (b S c) = (c S b) := by
  cases b
  cases c
  rfl
  rfl
  cases c
  rfl
  rfl

theorem bool_and_or (b c d : Bool) : (b && (c || d)) = (b && c || b && d) := by
  cases b
  rfl
  rfl

theorem bool_or_and (b c d : Bool) : (b || c && d) = ((b || c) && (b || d)) := by
  cases b
  rfl
  rfl

theorem bool_absorb_and (b c : Bool) : (b && (b || c)) = b := by
  cases b
  rfl
  rfl

theorem bool_absorb_or (b c : Bool) : (b || b && c) = b := by
  cases b
  rfl
  rfl

theorem bool_not_and (b c : Bool) : (!(b && c)) = (!b || !c) := by
  cases b
  rfl
  rfl

theorem bool_not_or (b c : Bool) : (!(b || c)) = (!b && !c) := by
  cases b
  rfl
  rfl

-- V: true | false
theorem bool_ne (b : Bool) (h : b = V) : ¬(b = !V) := by
  intro g
  cases h
  cases g

-- T: (b && c) = c | (b || c) = true | (!b) = false | (b && b) = true
theorem bool_of_true (b c : Bool) (h : b = true) : T := by
  cases h
  rfl

-- T: (b && c) = false | (b || c) = c | (!b) = true | (b || b) = false
theorem bool_of_false (b c : Bool) (h : b = false) : T := by
  cases h
  rfl

theorem bool_cases (b : Bool) : b = true ∨ b = false := by
  cases b
  right
  rfl
  left
  rfl

theorem bool_and_left (b c : Bool) (h : (b && c) = true) : b = true := by
  cases b
  cases h
  rfl

theorem bool_or_left (b c : Bool) (h : (b || c) = false) : b = false := by
  cases b
  rfl
  cases h

theorem bool_not_inj (b c : Bool) (h : (!b) = (!c)) : b = c := by
  cases b
  cases c
  rfl
  cases h
  cases c
  cases h
  rfl

theorem bool_forall (p : Bool → Prop) (h : p true) (g : p false) (b : Bool) : p b := by
  cases b
  exact g
  exact h

theorem bool_exists (p : Bool → Prop) (b : Bool) (h : p (!b)) : ∃ c, p c := by
  exact ⟨!b, h⟩

-- Lists -------------------------------------------------------------------------------------------

theorem nil_append (A : Type) (xs : List A) : [] ++ xs = xs := by
  rfl

theorem cons_append (A : Type) (x : A) (xs ys : List A) : x :: xs ++ ys = x :: (xs ++ ys) := by
  rfl

theorem cons_ne_nil (A : Type) (x : A) (xs : List A) : ¬(x :: xs = []) := by
  intro h
  cases h

theorem head_eq (A : Type) (x y : A) (xs ys : List A) (h : x :: xs = y :: ys) : x = y := by
  cases h
  rfl

theorem tail_eq (A : Type) (x y : A) (xs ys : List A) (h : x :: xs = y :: ys) : xs = ys := by
  cases h
  rfl

theorem append_nil (A : Type) (xs : List A) : xs ++ [] = xs := by
  induction xs
  rfl
  exact congrArg (cons head) tail_ih

theorem append_assoc (A : Type) (xs ys zs : List A) : (xs ++ ys) ++ zs = xs ++ (ys ++ zs) := by
  induction xs
  rfl
  exact congrArg (cons head) tail_ih

theorem each_id (A : Type) (xs : List A) : each id xs = xs := by
  induction xs
  rfl
  exact congrArg (cons head) tail_ih

theorem each_append (A B : Type) (f : A → B) (xs ys : List A) :
    each f (xs ++ ys) = each f xs ++ each f ys := by
  induction xs
  rfl
  exact congrArg (cons (f head)) tail_ih

theorem len_each (A B : Type) (f : A → B) (xs : List A) : len (each f xs) = len xs := by
  induction xs
  rfl
  exact congrArg succ tail_ih

theorem len_append (A : Type) (xs ys : List A) (h : ∀ a, zero + a = a)
    (g : ∀ a b, succ a + b = succ (a + b)) : len (xs ++ ys) = len xs + len ys := by
  induction xs
  exact Eq.symm (h (len ys))
  exact Eq.trans (congrArg succ tail_ih) (Eq.symm (g (len tail) (len ys)))

theorem rev_one (A : Type) (x : A) : rev (x :: []) = x :: [] := by
  rfl

-- C: x :: _ | _ ++ zs | zs ++ _ | rev _ | each f _
theorem list_context (A : Type) (f : A → A) (x : A) (xs ys zs : List A) (h : xs = ys) :
    C(xs) = C(ys) := by
  rw [h]

-- C: len _ | len (x :: _) | succ (len _)
theorem len_context (A : Type) (x : A) (xs ys : List A) (h : xs = ys) : C(xs) = C(ys) := by
  rw [h]

-- T: len xs = zero | rev xs = [] | xs ++ xs = [] | each id xs = []
theorem nil_value (A : Type) (xs : List A) (h : xs = []) : T := by
  rw [h]
  rfl

-- T: len (x :: []) = succ zero | len (x :: y :: []) = succ (succ zero)
theorem len_value (A : Type) (x y : A) : T := by
  rfl

-- T: x :: [] ++ y :: [] = x :: y :: [] | rev (x :: y :: []) = y :: x :: []
theorem two_elements (A : Type) (x y : A) : T := by
  rfl

-- T: each f [] = [] | each f (x :: []) = f x :: [] | each f (x :: y :: []) = f x :: f y :: []
theorem each_value (A : Type) (f : A → A) (x y : A) : T := by
  rfl

theorem len_cons (A : Type) (x : A) (xs : List A) : len (x :: xs) = succ (len xs) := by
  rfl

theorem len_cons_ne_zero (A : Type) (x : A) (xs : List A) : ¬(len (x :: xs) = zero) := by
  intro h
  cases h

theorem rev_cons (A : Type) (x : A) (xs : List A) : rev (x :: xs) = rev xs ++ (x :: []) := by
  rfl

theorem nil_or_cons (A : Type) (xs : List A) : xs = [] ∨ ∃ x, ∃ ys, xs = x :: ys := by
  cases xs
  left
  rfl
  right
  exact ⟨head, tail, rfl⟩

theorem nil_of_len_zero (A : Type) (xs : List A) (h : len xs = zero) : xs = [] := by
  cases xs
  rfl
  cases h

theorem each_each (A : Type) (f g : A → A) (xs : List A) (h : ∀ x, f (g x) = x) :
    each f (each g xs) = xs := by
  induction xs
  rfl
  show f (g head) :: each f (each g tail) = head :: tail
  rw [h]
  rw [tail_ih]

theorem each_same (A : Type) (f g : A → A) (xs : List A) (h : ∀ x, f x = g x) :
    each f xs = each g xs := by
  induction xs
  rfl
  show f head :: each f tail = g head :: each g tail
  rw [h]
  rw [tail_ih]

theorem append_cancel (A : Type) (x : A) (xs ys : List A) (h : x :: xs = x :: ys) (zs : List A) :
    xs ++ zs = ys ++ zs := by
  cases h
  rfl

theorem append_left_nil (A : Type) (xs ys : List A) (h : xs ++ ys = []) : xs = [] := by
  cases xs
  rfl
  cases h
