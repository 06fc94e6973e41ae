export async function prepare() { throw new Error("Photos cannot be read yet."); }
