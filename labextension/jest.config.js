module.exports = {
  testEnvironment: 'jsdom',
  setupFiles: ['<rootDir>/jest.setup.js'],
  testMatch: ['<rootDir>/src/__tests__/*.spec.{ts,tsx}'],
  transform: {
    '\\.tsx?$': [
      'ts-jest',
      { tsconfig: { jsx: 'react', module: 'commonjs', moduleResolution: 'node10', isolatedModules: true } }
    ]
  }
};
