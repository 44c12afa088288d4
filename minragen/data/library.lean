namespace Minragen
inductive N where
  | zero : N
  | succ (k : N) : N
noncomputable def N.add (a b : N) : N := N.rec (motive := fun _ => N) a (fun _ r => N.succ r) b
noncomputable instance : Add N := ⟨N.add⟩
noncomputable def N.mul (a b : N) : N :=
  N.rec (motive := fun _ => N) N.zero (fun _ r => r + a) b
noncomputable instance : Mul N := ⟨N.mul⟩
noncomputable def len {α : Type} (xs : List α) : N :=
  List.rec (motive := fun _ => N) N.zero (fun _ _ r => N.succ r) xs
noncomputable def rev {α : Type} (xs : List α) : List α :=
  List.rec (motive := fun _ => List α) [] (fun x _ r => r ++ [x]) xs
noncomputable def each {α β : Type} (f : α → β) (xs : List α) : List β :=
  List.rec (motive := fun _ => List β) [] (fun x _ r => f x :: r) xs
