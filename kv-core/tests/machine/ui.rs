//! What handles forbid must not compile.

#[test]
fn misuse_of_handles_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
