/-
The world in which the packaged Lean proves. `prelude` means that nothing is imported.

Lean's elaborator and kernel look things up by name (`Eq`, `HEq`, `Lean.ParserDescr`, ...). Names,
constructor orders and syntax kinds are therefore those of Lean 4's own library (Copyright Lean FRO,
Microsoft Corporation and contributors, Apache License 2.0); what is made of them is ours. Order:
logic, what `syntax` needs, what a macro needs, numbers and lists, notation, tactics, what `simp` and
`decide` need.

FOOTGUN: a helper whose full name Lean itself has (`Lean.mkApp2`) runs Lean's code, not the one
here. The same rule makes `syntax` of a name that Lean has (`Lean.Parser.Tactic.exact`) Lean's own.
`sorryAx` is there because Lean cannot even report an error without it; `#print axioms` tells on it.
-/
prelude
set_option autoImplicit false
set_option genCtorIdx false
set_option linter.all false
universe u v

-- Logic -------------------------------------------------------------------------------------------

unsafe axiom lcErased : Type
unsafe axiom lcAny : Type
unsafe axiom lcVoid : Type
def id {α : Sort u} (a : α) : α := a
set_option bootstrap.inductiveCheckResultingUniverse false in
inductive PUnit : Sort u where
  | unit : PUnit
abbrev Unit : Type := PUnit
@[match_pattern] abbrev Unit.unit : Unit := PUnit.unit
structure PULift.{r, s} (α : Sort s) : Sort (max s r 1) where
  up ::
  down : α
structure PProd (α : Sort u) (β : Sort v) where
  fst : α
  snd : β
def Function.const {α : Sort u} (β : Sort v) (a : α) : β → α := fun _ => a
inductive HEq : {α : Sort u} → α → {β : Sort u} → β → Prop where
  | refl {α : Sort u} (a : α) : HEq a a
inductive Eq {α : Sort u} : α → α → Prop where
  | refl (a : α) : Eq a a
abbrev Eq.ndrec.{u1, u2} {α : Sort u2} {a : α} {motive : α → Sort u1} (m : motive a) {b : α}
    (h : Eq a b) : motive b := h.rec m
inductive False : Prop
inductive True : Prop where
  | intro : True
structure And (a b : Prop) : Prop where
  intro ::
  left : a
  right : b
inductive Or (a b : Prop) : Prop where
  | inl (h : a) : Or a b
  | inr (h : b) : Or a b
inductive Exists {α : Sort u} (p : α → Prop) : Prop where
  | intro (w : α) (h : p w) : Exists p
def Not (a : Prop) : Prop := a → False
structure Iff (a b : Prop) : Prop where
  intro ::
  mp : a → b
  mpr : b → a
theorem rfl {α : Sort u} {a : α} : Eq a a := Eq.refl a
theorem Eq.subst {α : Sort u} {motive : α → Prop} {a b : α} (h : Eq a b) (m : motive a) :
    motive b := Eq.ndrec m h
theorem Eq.symm {α : Sort u} {a b : α} (h : Eq a b) : Eq b a :=
  Eq.subst (motive := fun x => Eq x a) h rfl
theorem Eq.trans {α : Sort u} {a b c : α} (h : Eq a b) (k : Eq b c) : Eq a c :=
  Eq.subst (motive := fun x => Eq a x) k h
theorem congrArg {α : Sort u} {β : Sort v} {a b : α} (f : α → β) (h : Eq a b) : Eq (f a) (f b) :=
  Eq.subst (motive := fun x => Eq (f a) (f x)) h rfl
noncomputable def absurd {a : Prop} {b : Sort v} (h : a) (k : Not a) : b := (k h).rec
noncomputable def False.elim {C : Sort u} (h : False) : C := h.rec
def cast {α β : Sort u} (h : Eq α β) (a : α) : β := h.rec a
theorem eq_of_heq {α : Sort u} {a a' : α} (h : HEq a a') : Eq a a' :=
  have : (α β : Sort u) → (a : α) → (b : β) → HEq a b → (h : Eq α β) → Eq (cast h a) b :=
    fun _ _ _ _ h₁ => h₁.rec (fun _ => rfl)
  this α α a a' h rfl
theorem heq_of_eq {α : Sort u} {a a' : α} (h : Eq a a') : HEq a a' :=
  Eq.subst (motive := fun x => HEq a x) h (HEq.refl a)
def Eq.mp {α β : Sort u} (h : Eq α β) (a : α) : β := cast h a
def Eq.mpr {α β : Sort u} (h : Eq α β) (b : β) : α := cast h.symm b

-- What `syntax` needs -----------------------------------------------------------------------------

inductive Nat where
  | zero : Nat
  | succ (n : Nat) : Nat
inductive Bool : Type where
  | false : Bool
  | true : Bool
export Bool (false true)
def cond {α : Sort u} (c : Bool) (a b : α) : α := match c with
  | .true => a
  | .false => b
@[reducible] noncomputable def Bool.ctorIdx (b : Bool) : Nat := cond b Nat.zero.succ Nat.zero
@[extern "lean_nat_dec_le"] def Nat.ble (a b : Nat) : Bool :=
  Nat.rec (motive := fun _ => Nat → Bool) (fun _ => .true)
    (fun _ le b => Nat.rec (motive := fun _ => Bool) .false (fun b _ => le b) b) a b
@[extern "lean_nat_dec_eq"] def Nat.beq (a b : Nat) : Bool :=
  Nat.rec (motive := fun _ => Nat → Bool)
    (fun b => Nat.rec (motive := fun _ => Bool) .true (fun _ _ => .false) b)
    (fun _ eq b => Nat.rec (motive := fun _ => Bool) .false (fun b _ => eq b) b) a b
theorem noConfusion_of_Nat {α : Sort u} (f : α → Nat) {a b : α} (h : Eq a b) :
    Bool.rec (motive := fun _ => Prop) False True (Nat.beq (f a) (f b)) :=
  Eq.subst (motive := fun x => Bool.rec (motive := fun _ => Prop) False True (Nat.beq (f a) (f x)))
    h (Nat.rec (motive := fun n => Bool.rec (motive := fun _ => Prop) False True (Nat.beq n n))
      True.intro (fun _ same => same) (f a))
class OfNat (α : Type u) (_ : Nat) where
  ofNat : α
instance instOfNatNat (n : Nat) : OfNat Nat n where
  ofNat := n
inductive Option (α : Type u) where
  | none : Option α
  | some (val : α) : Option α
set_option genCtorIdx true in
inductive List (α : Type u) where
  | nil : List α
  | cons (head : α) (tail : List α) : List α
axiom sorryAx (α : Sort u) (synthetic : Bool) : α
structure String where
  ofByteArray ::
  toByteArray : Unit
namespace Lean
inductive Name where
  | anonymous : Name
  | str (pre : Name) (str : String)
  | num (pre : Name) (i : Nat)
abbrev Name.mkStr (p : Name) (s : String) : Name := Name.str p s
abbrev Name.mkSimple (s : String) : Name := .str .anonymous s
-- `extern`: a real Name carries its hash, which only Lean's own code can put there.
@[extern "lean_name_mk_str1"] def Name.mkStr1 (s1 : String) : Name := .str .anonymous s1
@[extern "lean_name_mk_str2"] def Name.mkStr2 (s1 s2 : String) : Name :=
  .str (.str .anonymous s1) s2
@[extern "lean_name_mk_str3"] def Name.mkStr3 (s1 s2 s3 : String) : Name :=
  .str (.str (.str .anonymous s1) s2) s3
@[extern "lean_name_mk_str4"] def Name.mkStr4 (s1 s2 s3 s4 : String) : Name :=
  .str (.str (.str (.str .anonymous s1) s2) s3) s4
abbrev SyntaxNodeKind := Name
inductive ParserDescr where
  | const (name : Name)
  | unary (name : Name) (p : ParserDescr)
  | binary (name : Name) (p₁ p₂ : ParserDescr)
  | node (kind : SyntaxNodeKind) (prec : Nat) (p : ParserDescr)
  | trailingNode (kind : SyntaxNodeKind) (prec lhsPrec : Nat) (p : ParserDescr)
  | symbol (val : String)
  | nonReservedSymbol (val : String) (includeIdent : Bool)
  | cat (catName : Name) (rbp : Nat)
  | parser (declName : Name)
  | nodeWithAntiquot (name : String) (kind : SyntaxNodeKind) (p : ParserDescr)
  | sepBy (p : ParserDescr) (sep : String) (psep : ParserDescr) (allowTrailingSep : Bool)
  | sepBy1 (p : ParserDescr) (sep : String) (psep : ParserDescr) (allowTrailingSep : Bool)
  | unicodeSymbol (val asciiVal : String) (preserveForPP : Bool)
abbrev TrailingParserDescr := ParserDescr
end Lean

-- What a macro needs: the shapes of Lean's own syntax trees ---------------------------------------

structure Array (α : Type u) where
  mk ::
  toList : List α
attribute [extern "lean_array_mk"] Array.mk
attribute [extern "lean_array_to_list"] Array.toList
structure String.Pos.Raw where
  byteIdx : Nat
structure Substring.Raw where
  str : String
  startPos : String.Pos.Raw
  stopPos : String.Pos.Raw
inductive EStateM.Result (ε σ α : Type u) : Type u where
  | ok : α → σ → EStateM.Result ε σ α
  | error : ε → σ → EStateM.Result ε σ α
namespace Lean
inductive SourceInfo where
  | original (leading : Substring.Raw) (pos : String.Pos.Raw) (trailing : Substring.Raw)
      (endPos : String.Pos.Raw)
  | synthetic (pos endPos : String.Pos.Raw) (canonical : Bool)
  | none
inductive Syntax.Preresolved where
  | namespace (ns : Name)
  | decl (n : Name) (fields : List String)
inductive Syntax : Type where
  | missing
  | node (info : SourceInfo) (kind : SyntaxNodeKind) (args : Array Syntax)
  | atom (info : SourceInfo) (val : String)
  | ident (info : SourceInfo) (rawVal : Substring.Raw) (val : Name)
      (preresolved : List Syntax.Preresolved)
inductive Macro.Context where | mk
inductive Macro.State where | mk
inductive Macro.Exception where
  | error : Syntax → String → Macro.Exception
  | unsupportedSyntax : Macro.Exception
abbrev Macro : Type := Syntax → Macro.Context → Macro.State →
  EStateM.Result Macro.Exception Macro.State Syntax
abbrev PrettyPrinter.Unexpander : Type := Syntax → Syntax → Unit → EStateM.Result Unit Unit Syntax
end Lean

-- Booleans, numbers and lists: functions by recursor, so that `rfl` computes ----------------------

noncomputable def Bool.not (b : Bool) : Bool := Bool.rec (motive := fun _ => Bool) true false b
noncomputable def Bool.and (b c : Bool) : Bool := Bool.rec (motive := fun _ => Bool) false c b
noncomputable def Bool.or (b c : Bool) : Bool := Bool.rec (motive := fun _ => Bool) c true b

set_option genCtorIdx true in
inductive N where
  | zero : N
  | succ (k : N) : N
noncomputable def N.add (a b : N) : N := N.rec (motive := fun _ => N) a (fun _ r => N.succ r) b
noncomputable def N.mul (a b : N) : N :=
  N.rec (motive := fun _ => N) N.zero (fun _ r => N.add r a) b
noncomputable def List.append {α : Type} (xs ys : List α) : List α :=
  List.rec (motive := fun _ => List α) ys (fun x _ r => List.cons x r) xs
noncomputable def len {α : Type} (xs : List α) : N :=
  List.rec (motive := fun _ => N) N.zero (fun _ _ r => N.succ r) xs
noncomputable def rev {α : Type} (xs : List α) : List α :=
  List.rec (motive := fun _ => List α) List.nil
    (fun x _ r => List.append r (List.cons x List.nil)) xs
noncomputable def each {α β : Type} (f : α → β) (xs : List α) : List β :=
  List.rec (motive := fun _ => List β) List.nil (fun x _ r => List.cons (f x) r) xs

-- Notation: each symbol is a macro for its constant, and an unexpander prints the symbol again ----

namespace Notation
open Lean
def tree (kind : Name) (args : List Syntax) : Syntax := .node .none kind (.mk args)
def word (name : Name) : Syntax := .ident .none ⟨"", ⟨Nat.zero⟩, ⟨Nat.zero⟩⟩ name .nil
def token (text : String) : Syntax := .atom .none text
def call (f : Name) (args : List Syntax) : Syntax :=
  tree `Lean.Parser.Term.app (.cons (word f) (.cons (tree `null args) .nil))
def children : Syntax → List Syntax
  | .node _ _ args => args.toList
  | _ => .nil
def second (args : List Syntax) : List Syntax :=
  match args with
  | .cons _ (.cons more _) => children more
  | _ => .nil
-- a ∧ b  =  And a b
def binop (f : Name) : Macro := fun stx _ s =>
  match children stx with
  | .cons a (.cons _ (.cons b _)) => .ok (call f (.cons a (.cons b .nil))) s
  | _ => .error .unsupportedSyntax s
def unbinop (kind : Name) (symbol : String) : PrettyPrinter.Unexpander := fun stx _ s =>
  match second (children stx) with
  | .cons a (.cons b .nil) => .ok (tree kind (.cons a (.cons (token symbol) (.cons b .nil)))) s
  | _ => .error PUnit.unit s
-- ∃ x, b  =  Exists fun x => b
def binder (f : Name) : Macro := fun stx _ s =>
  match children stx with
  | .cons _ (.cons x (.cons _ (.cons b _))) =>
    .ok (call f (.cons (tree `Lean.Parser.Term.fun (.cons (token "fun") (.cons
      (tree `Lean.Parser.Term.basicFun (.cons (tree `null (.cons x .nil)) (.cons (tree `null .nil)
        (.cons (token "=>") (.cons b .nil))))) .nil))) .nil)) s
  | _ => .error .unsupportedSyntax s
def unbinder (kind : Name) (symbol : String) : PrettyPrinter.Unexpander := fun stx _ s =>
  match second (children stx) with
  | .cons f .nil => match second (children f) with
    | .cons xs (.cons _ (.cons _ (.cons b _))) => match children xs with
      | .cons x .nil => .ok (tree kind
          (.cons (token symbol) (.cons x (.cons (token ",") (.cons b .nil))))) s
      | _ => .error PUnit.unit s
    | _ => .error PUnit.unit s
  | _ => .error PUnit.unit s
-- ¬a  =  Not a
def prefixed (f : Name) : Macro := fun stx _ s =>
  match children stx with
  | .cons _ args => .ok (call f args) s
  | _ => .error .unsupportedSyntax s
def unprefixed (kind : Name) (symbol : String) : PrettyPrinter.Unexpander := fun stx _ s =>
  match second (children stx) with
  | .cons a .nil => .ok (tree kind (.cons (token symbol) (.cons a .nil))) s
  | _ => .error PUnit.unit s
end Notation
open Notation

syntax:20 (name := termIff) term:21 " ↔ " term:21 : term
@[macro termIff] def expandIff : Lean.Macro := binop `Iff
@[app_unexpander Iff] def printIff : Lean.PrettyPrinter.Unexpander := unbinop `termIff "↔"
syntax:30 (name := termOr) term:31 " ∨ " term:30 : term
@[macro termOr] def expandOr : Lean.Macro := binop `Or
@[app_unexpander Or] def printOr : Lean.PrettyPrinter.Unexpander := unbinop `termOr "∨"
syntax:35 (name := termAnd) term:36 " ∧ " term:35 : term
@[macro termAnd] def expandAnd : Lean.Macro := binop `And
@[app_unexpander And] def printAnd : Lean.PrettyPrinter.Unexpander := unbinop `termAnd "∧"
syntax:50 (name := termEq) term:51 " = " term:51 : term
@[macro termEq] def expandEq : Lean.Macro := binop `Eq
@[app_unexpander Eq] def printEq : Lean.PrettyPrinter.Unexpander := unbinop `termEq "="
syntax:35 (name := termAndB) term:35 " && " term:36 : term
@[macro termAndB] def expandAndB : Lean.Macro := binop `Bool.and
@[app_unexpander Bool.and]
def printAndB : Lean.PrettyPrinter.Unexpander := unbinop `termAndB "&&"
syntax:30 (name := termOrB) term:30 " || " term:31 : term
@[macro termOrB] def expandOrB : Lean.Macro := binop `Bool.or
@[app_unexpander Bool.or]
def printOrB : Lean.PrettyPrinter.Unexpander := unbinop `termOrB "||"
syntax:65 (name := termAppend) term:65 " ++ " term:66 : term
@[macro termAppend] def expandAppend : Lean.Macro := binop `List.append
@[app_unexpander List.append]
def printAppend : Lean.PrettyPrinter.Unexpander := unbinop `termAppend "++"
syntax:67 (name := termCons) term:68 " :: " term:67 : term
@[macro termCons] def expandCons : Lean.Macro := binop `List.cons
@[app_unexpander List.cons]
def printCons : Lean.PrettyPrinter.Unexpander := unbinop `termCons "::"
syntax:65 (name := termAdd) term:65 " + " term:66 : term
@[macro termAdd] def expandAdd : Lean.Macro := binop `N.add
@[app_unexpander N.add] def printAdd : Lean.PrettyPrinter.Unexpander := unbinop `termAdd "+"
syntax:70 (name := termMul) term:70 " * " term:71 : term
@[macro termMul] def expandMul : Lean.Macro := binop `N.mul
@[app_unexpander N.mul] def printMul : Lean.PrettyPrinter.Unexpander := unbinop `termMul "*"
syntax (name := termEx) "∃ " ident ", " term : term
@[macro termEx] def expandEx : Lean.Macro := binder `Exists
@[app_unexpander Exists] def printEx : Lean.PrettyPrinter.Unexpander := unbinder `termEx "∃"
syntax:1024 (name := termNot) "¬" term:40 : term
@[macro termNot] def expandNot : Lean.Macro := prefixed `Not
@[app_unexpander Not] def printNot : Lean.PrettyPrinter.Unexpander := unprefixed `termNot "¬"
syntax:1024 (name := termNotB) "!" term:40 : term
@[macro termNotB] def expandNotB : Lean.Macro := prefixed `Bool.not
@[app_unexpander Bool.not]
def printNotB : Lean.PrettyPrinter.Unexpander := unprefixed `termNotB "!"
syntax (name := termEmpty) "[" "]" : term
@[macro termEmpty] def expandEmpty : Lean.Macro := fun _ _ s => .ok (word `List.nil) s
@[app_unexpander List.nil] def printEmpty : Lean.PrettyPrinter.Unexpander := fun _ _ s =>
  .ok (tree `termEmpty (.cons (token "[") (.cons (token "]") .nil))) s

-- Tactics: the elaborators are Lean's own, only their syntax is declared --------------------------

namespace Lean.Parser.Tactic
syntax (name := paren) "(" withoutPosition(tacticSeq) ")" : tactic
syntax (name := exact) "exact " term : tactic
syntax (name := intros) "intros" many(ppSpace colGt orelse(ident, hole)) : tactic
syntax (name := intro) "intro" notFollowedBy("|") many(ppSpace colGt term:1024) : tactic
syntax (name := apply) "apply " term : tactic
syntax (name := refine) "refine " term : tactic
syntax (name := assumption) "assumption" : tactic
syntax (name := constructor) "constructor" : tactic
syntax (name := left) "left" : tactic
syntax (name := right) "right" : tactic
syntax (name := eqRefl) "eq_refl" : tactic
syntax (name := skip) "skip" : tactic
syntax (name := contradiction) "contradiction" : tactic
syntax (name := «show») "show " term : tactic
syntax (name := revert) "revert" many1(ppSpace colGt term:1024) : tactic
syntax (name := clear) "clear" many1(ppSpace colGt term:1024) : tactic
syntax (name := subst) "subst" many1(ppSpace colGt term:1024) : tactic
syntax (name := specialize) "specialize " term : tactic
syntax (name := injection) "injection " term optional(" with " many1(colGt orelse(ident, hole))) :
  tactic
syntax (name := traceState) "trace_state" : tactic
syntax inductionAltLHS := withPosition("| " orelse(group(optional("@") ident), hole)
  many(colGt orelse(ident, hole)))
syntax inductionAlt := many1(inductionAltLHS)
  optional(" => " orelse(hole, orelse(syntheticHole, tacticSeq)))
syntax inductionAlts := " with" optional(ppSpace colGt tactic)
  withPosition(many(colGe inductionAlt))
syntax elimTarget := optional(atomic(ident " : ")) term
syntax (name := cases) "cases " sepBy1(elimTarget, ", ") optional(" using " term)
  optional(inductionAlts) : tactic
syntax (name := induction) "induction " sepBy1(elimTarget, ", ") optional(" using " term)
  optional(" generalizing" many1(ppSpace colGt term:1024)) optional(inductionAlts) : tactic
syntax configItem := "+" noWs ident
syntax optConfig := many(colGt configItem)
syntax rwRule := optional("← ") term
syntax rwRuleSeq := " [" sepBy(rwRule, ", ") "]"
syntax locationWildcard := " *"
syntax locationHyp := many1(ppSpace colGt term:1024)
syntax location := withPosition(ppGroup(" at" orelse(locationWildcard, locationHyp)))
syntax (name := rewriteSeq) "rewrite" optConfig rwRuleSeq optional(location) : tactic
end Lean.Parser.Tactic

syntax (name := rflTactic) "rfl" : tactic
def eqRefl : Lean.Syntax := tree `Lean.Parser.Tactic.eqRefl (.cons (token "eq_refl") .nil)
@[macro rflTactic] def expandRfl : Lean.Macro := fun _ _ s => .ok eqRefl s
def seq (tactics : List Lean.Syntax) : Lean.Syntax :=
  tree `Lean.Parser.Tactic.tacticSeq (.cons (tree `Lean.Parser.Tactic.tacticSeq1Indented
    (.cons (tree `null tactics) .nil)) .nil)
def alternative (tactic : Lean.Syntax) : Lean.Syntax :=
  tree `group (.cons (token "|") (.cons (seq (.cons tactic .nil)) .nil))
syntax (name := exfalsoTactic) "exfalso" : tactic
@[macro exfalsoTactic] def expandExfalso : Lean.Macro := fun _ _ s =>
  .ok (tree `Lean.Parser.Tactic.apply (.cons (token "apply") (.cons (word `False.elim) .nil))) s
-- have h : p := e  =  refine (fun h : p => ?_) e
syntax (name := haveTactic) "have " ident " : " term " := " term : tactic
def goal : Lean.Syntax := tree `Lean.Parser.Term.syntheticHole (.cons (token "?")
  (.cons (tree `Lean.Parser.Term.hole (.cons (token "_") .nil)) .nil))
@[macro haveTactic] def expandHave : Lean.Macro := fun stx _ s =>
  match children stx with
  | .cons _ (.cons h (.cons colon (.cons p (.cons _ (.cons e _))))) =>
    .ok (tree `Lean.Parser.Tactic.refine (.cons (token "refine") (.cons
      (tree `Lean.Parser.Term.app (.cons (tree `Lean.Parser.Term.fun (.cons (token "fun") (.cons
        (tree `Lean.Parser.Term.basicFun (.cons (tree `null (.cons h .nil)) (.cons (tree `null
          (.cons (tree `Lean.Parser.Term.typeSpec (.cons colon (.cons p .nil))) .nil))
          (.cons (token "=>") (.cons goal .nil))))) .nil)))
        (.cons (tree `null (.cons e .nil)) .nil))) .nil))) s
  | _ => .error .unsupportedSyntax s
-- rw [h]  =  rewrite [h]; first | with_reducible rfl | skip
syntax (name := rwTactic) "rw" Lean.Parser.Tactic.optConfig Lean.Parser.Tactic.rwRuleSeq
  optional(Lean.Parser.Tactic.location) : tactic
def close : Lean.Syntax := tree `Lean.Parser.Tactic.first (.cons (token "first") (.cons (tree `null
  (.cons (alternative (tree `Lean.Parser.Tactic.withReducible
    (.cons (token "with_reducible") (.cons (seq (.cons eqRefl .nil)) .nil))))
  (.cons (alternative (tree `Lean.Parser.Tactic.skip (.cons (token "skip") .nil))) .nil))) .nil))
@[macro rwTactic] def expandRw : Lean.Macro := fun stx _ s =>
  match children stx with
  | .cons _ rest => .ok (tree `Lean.Parser.Tactic.paren (.cons (token "(") (.cons (seq (.cons
      (tree `Lean.Parser.Tactic.rewriteSeq (.cons (token "rewrite") rest))
      (.cons (token ";") (.cons close .nil)))) (.cons (token ")") .nil)))) s
  | _ => .error .unsupportedSyntax s

-- What `simp` and `decide` need: the lemmas that Lean looks up by name, and a small simp set -------

axiom propext {a b : Prop} (h : a ↔ b) : a = b
theorem of_eq_true {p : Prop} (h : p = True) : p := Eq.mpr (α := p) (β := True) h True.intro
theorem eq_true {p : Prop} (h : p) : p = True := propext ⟨fun _ => True.intro, fun _ => h⟩
theorem eq_false {p : Prop} (h : ¬p) : p = False := propext ⟨fun a => h a, fun a => a.elim⟩
theorem eq_false' {p : Prop} (h : p → False) : p = False := eq_false h
theorem of_eq_false {p : Prop} (h : p = False) : ¬p := fun a => Eq.mp (α := p) (β := False) h a
theorem congrFun {α : Sort u} {β : α → Sort v} {f g : (x : α) → β x} (h : f = g) (a : α) :
    f a = g a := @Eq.ndrec _ f (fun x => f a = x a) rfl g h
theorem congrFun' {α : Sort u} {β : Sort v} {f g : α → β} (h : f = g) (a : α) : f a = g a :=
  congrFun h a
theorem congr {α : Sort u} {β : Sort v} {f g : α → β} {a b : α} (h : f = g) (k : a = b) :
    f a = g b := Eq.trans (congrFun h a) (congrArg g k)
theorem implies_congr_ctx {p p' q q' : Prop} (h : p = p') (k : p' → q = q') :
    (p → q) = (p' → q') := propext
  ⟨fun f a => Eq.mp (α := q) (β := q') (k a) (f (Eq.mpr (α := p) (β := p') h a)),
   fun f a => Eq.mpr (α := q) (β := q') (k (Eq.mp (α := p) (β := p') h a))
     (f (Eq.mp (α := p) (β := p') h a))⟩
theorem implies_congr {p p' q q' : Prop} (h : p = p') (k : q = q') : (p → q) = (p' → q') :=
  implies_congr_ctx h (fun _ => k)
theorem forall_congr {α : Sort u} {p q : α → Prop} (h : ∀ a, p a = q a) :
    (∀ a, p a) = (∀ a, q a) := propext
  ⟨fun f a => Eq.mp (α := p a) (β := q a) (h a) (f a),
   fun f a => Eq.mpr (α := p a) (β := q a) (h a) (f a)⟩
init_quot
axiom Quot.sound {α : Sort u} {r : α → α → Prop} {a b : α} (h : r a b) : Quot.mk r a = Quot.mk r b
def agree {α : Sort u} {β : α → Sort v} (f g : (x : α) → β x) : Prop := ∀ x, f x = g x
noncomputable def value {α : Sort u} {β : α → Sort v} (f : Quot (agree (β := β))) (x : α) :
    β x :=
  Quot.lift (fun g => g x) (fun _ _ h => h x) f
theorem funext {α : Sort u} {β : α → Sort v} {f g : (x : α) → β x} (h : ∀ x, f x = g x) : f = g :=
  show value (Quot.mk agree f) = value (Quot.mk agree g) from congrArg value (Quot.sound h)
class inductive Decidable (p : Prop) where
  | isFalse (h : ¬p) : Decidable p
  | isTrue (h : p) : Decidable p
@[reducible] noncomputable def Decidable.decide (p : Prop) [d : Decidable p] : Bool :=
  Decidable.rec (motive := fun _ => Bool) (fun _ => Bool.false) (fun _ => Bool.true) d
theorem of_decide_eq_true {p : Prop} [d : Decidable p] (h : Decidable.decide p = Bool.true) : p :=
  Decidable.rec (motive := fun d => Decidable.decide p (d := d) = Bool.true → p)
    (fun _ k => (noConfusion_of_Nat Bool.ctorIdx k).elim) (fun h _ => h) d h
instance : Decidable True := .isTrue True.intro
instance : Decidable False := .isFalse id
noncomputable instance {p q : Prop} [a : Decidable p] [b : Decidable q] : Decidable (p ∧ q) :=
  a.rec (motive := fun _ => Decidable (p ∧ q)) (fun h => .isFalse fun k => h k.left) fun h =>
    b.rec (motive := fun _ => Decidable (p ∧ q)) (fun k => .isFalse fun l => k l.right)
      fun k => .isTrue ⟨h, k⟩
noncomputable instance {p q : Prop} [a : Decidable p] [b : Decidable q] : Decidable (p → q) :=
  b.rec (motive := fun _ => Decidable (p → q))
    (fun k => a.rec (motive := fun _ => Decidable (p → q))
      (fun h => .isTrue fun l => (h l).elim) fun h => .isFalse fun l => k (l h))
    fun k => .isTrue fun _ => k
noncomputable instance {p : Prop} [a : Decidable p] : Decidable (¬p) :=
  a.rec (motive := fun _ => Decidable (¬p)) (fun h => .isTrue h) fun h => .isFalse fun k => k h
noncomputable instance {p q : Prop} [a : Decidable p] [b : Decidable q] : Decidable (p ∨ q) :=
  a.rec (motive := fun _ => Decidable (p ∨ q))
    (fun h => b.rec (motive := fun _ => Decidable (p ∨ q))
      (fun k => .isFalse fun l => l.rec h k) fun k => .isTrue (.inr k))
    fun h => .isTrue (.inl h)
noncomputable instance {p : Bool → Prop} [a : Decidable (p true)] [b : Decidable (p false)] :
    Decidable (∀ c, p c) :=
  a.rec (motive := fun _ => Decidable (∀ c, p c)) (fun h => .isFalse fun k => h (k true)) fun h =>
    b.rec (motive := fun _ => Decidable (∀ c, p c)) (fun k => .isFalse fun l => k (l false))
      fun k => .isTrue fun c => c.rec k h
theorem Bool.differ (h : true = false) : False :=
  noConfusion_of_Nat Bool.ctorIdx h
noncomputable instance (b c : Bool) : Decidable (b = c) :=
  b.rec (motive := fun b => Decidable (b = c))
    (c.rec (motive := fun c => Decidable (false = c)) (.isTrue rfl)
      (.isFalse fun h => Bool.differ h.symm))
    (c.rec (motive := fun c => Decidable (true = c)) (.isFalse Bool.differ) (.isTrue rfl))

syntax (name := Lean.Parser.Attr.simp) "simp" optional("↓") optional("← ") optional(prio) : attr
@[simp] theorem eq_self {α : Sort u} (a : α) : (a = a) = True := eq_true rfl
@[simp] theorem iff_self (p : Prop) : (p ↔ p) = True := eq_true ⟨id, id⟩
@[simp] theorem and_self (p : Prop) : (p ∧ p) = p := propext ⟨(·.left), fun h => ⟨h, h⟩⟩
@[simp] theorem or_self (p : Prop) : (p ∨ p) = p := propext ⟨fun h => h.rec id id, .inl⟩
@[simp] theorem and_true (p : Prop) : (p ∧ True) = p := propext ⟨(·.left), fun h => ⟨h, .intro⟩⟩
@[simp] theorem true_and (p : Prop) : (True ∧ p) = p := propext ⟨(·.right), fun h => ⟨.intro, h⟩⟩
@[simp] theorem and_false (p : Prop) : (p ∧ False) = False := eq_false (·.right)
@[simp] theorem false_and (p : Prop) : (False ∧ p) = False := eq_false (·.left)
@[simp] theorem or_true (p : Prop) : (p ∨ True) = True := eq_true (.inr .intro)
@[simp] theorem true_or (p : Prop) : (True ∨ p) = True := eq_true (.inl .intro)
@[simp] theorem or_false (p : Prop) : (p ∨ False) = p := propext ⟨fun h => h.rec id (·.elim), .inl⟩
@[simp] theorem false_or (p : Prop) : (False ∨ p) = p := propext ⟨fun h => h.rec (·.elim) id, .inr⟩
@[simp] theorem not_true : (¬True) = False := eq_false (· .intro)
@[simp] theorem not_false : (¬False) = True := eq_true id
@[simp] theorem imp_true {α : Sort u} : (α → True) = True := eq_true fun _ => .intro
@[simp] theorem true_imp (p : Prop) : (True → p) = p := propext ⟨(· .intro), fun h _ => h⟩
@[simp] theorem false_imp (p : Prop) : (False → p) = True := eq_true (·.elim)
@[simp] theorem exists_false {α : Sort u} : Exists (fun _ : α => False) = False :=
  eq_false fun h => h.rec fun _ none => none
@[simp] theorem N.add_zero (n : N) : n + N.zero = n := rfl
@[simp] theorem N.add_succ (n m : N) : n + N.succ m = N.succ (n + m) := rfl
@[simp] theorem N.mul_zero (n : N) : n * N.zero = N.zero := rfl
@[simp] theorem N.mul_succ (n m : N) : n * N.succ m = n * m + n := rfl
@[simp] theorem List.nil_append {α : Type} (xs : List α) : [] ++ xs = xs := rfl
@[simp] theorem List.cons_append {α : Type} (x : α) (xs ys : List α) :
    x :: xs ++ ys = x :: (xs ++ ys) := rfl
@[simp] theorem Bool.not_true : (!true) = false := rfl
@[simp] theorem Bool.not_false : (!false) = true := rfl
@[simp] theorem Bool.true_and (b : Bool) : (true && b) = b := rfl
@[simp] theorem Bool.false_and (b : Bool) : (false && b) = false := rfl
@[simp] theorem Bool.true_or (b : Bool) : (true || b) = true := rfl
@[simp] theorem Bool.false_or (b : Bool) : (false || b) = b := rfl

namespace Lean.Parser.Tactic
syntax simpPre := "↓"
syntax simpPost := "↑"
syntax simpLemma := optional(orelse(simpPre, simpPost)) optional("← ") term
syntax simpErase := "-" term:1024
syntax simpStar := "*"
syntax discharger := " (" &"disch" " := " tacticSeq ")"
syntax (name := simp) "simp" optConfig optional(discharger) optional(&" only")
  optional(" [" sepBy(orelse(simpStar, orelse(simpErase, simpLemma)), ", ") "]")
  optional(location) : tactic
syntax (name := decide) "decide" optConfig : tactic
end Lean.Parser.Tactic
